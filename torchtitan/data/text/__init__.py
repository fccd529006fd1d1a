"""Between texts and tokens: a folder's tokenizer, and the process rendering its template."""
