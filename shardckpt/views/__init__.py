"""A checkpoint as files and arrays that are read on demand, without an export.

`safetensors_view` and `safe_open` give the files that `export_safetensors` would write; `filesystem` offers them to fsspec. The command
line and the service may import this package. Begin with `model_view`.
"""
