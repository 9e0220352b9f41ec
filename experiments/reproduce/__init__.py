"""Papers, one file each: what was claimed, what was expected, what was got."""
