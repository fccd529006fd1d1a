"""Hugging Face folders in and out, and the LLaMA models they hold."""
