"""Files as plain values: JSON that anyone may have written, CSV tables, safe replacement."""
