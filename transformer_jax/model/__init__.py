"""The model: the only importer of flax.linen. It knows no search, no device and no file."""
