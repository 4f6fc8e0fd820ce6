"""Models on disk, in the layout of the released files."""
