"""Image classifiers of the library transformers, in TorchTitan's pipeline."""
