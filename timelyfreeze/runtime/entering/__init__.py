"""The entry of a batch into a pipeline with a frozen front, and activations not kept there."""
