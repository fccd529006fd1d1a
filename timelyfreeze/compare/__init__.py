"""Many runs side by side: run them, group them, table and plot them."""
