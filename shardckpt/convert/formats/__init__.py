"""A folder for each format: `source` reads it, `target` writes it."""
