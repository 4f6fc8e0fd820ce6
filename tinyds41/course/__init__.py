"""The tour, and what lessons share."""
