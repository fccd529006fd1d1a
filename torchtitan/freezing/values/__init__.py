"""Values of a configuration: read, and checked without a model, in a second."""
