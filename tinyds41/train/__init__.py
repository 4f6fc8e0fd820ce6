"""Texts, batches and training of tinyds41 models."""
