"""Running a trained model: what a reader of its text needs."""
