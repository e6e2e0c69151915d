"""Safetensors files, one or several with an index. Begin with `header`."""
