"""A checkpoint as files, arrays and weights of a model that are read on demand, without an export.

`safetensors_view` and `safe_open` give the files that `export_safetensors` would write;
`filesystem` offers them to fsspec. A process reads only its part of the weights: `pretrained` loads
a model of transformers, and `placeholders` are tensors for the loaders of inference engines. The
command line and the service may import this package. Begin with `model_view`.
"""
