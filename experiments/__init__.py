"""Scripts: each says what it does with `--help`."""
