"""Groups of zarr arrays."""
