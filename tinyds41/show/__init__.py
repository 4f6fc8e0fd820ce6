"""Pictures and tables of what a model is and does."""
