"""What this fork changes of upstream, each change with its reason."""
