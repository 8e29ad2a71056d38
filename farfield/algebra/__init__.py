"""The mathematics: tensors only, no modules, no configuration, no input or output."""
