"""Changes of this fork to upstream, with their reasons."""
