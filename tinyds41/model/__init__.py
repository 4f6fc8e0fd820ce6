"""The model: one file per idea. A layer knows other tokens through its `Context` alone."""
