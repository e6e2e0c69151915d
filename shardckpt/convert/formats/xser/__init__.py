"""Files of torch_xla's `xser.save`."""
