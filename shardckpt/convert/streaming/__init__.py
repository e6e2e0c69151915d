"""Outputs read block by block within a memory limit. Begin with `stream`."""
