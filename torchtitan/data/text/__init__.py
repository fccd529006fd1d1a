"""Between texts and tokens: a folder's tokenizer, and the process that renders its template."""
