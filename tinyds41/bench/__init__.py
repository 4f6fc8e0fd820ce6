"""Measurements: ratios within one run, as a table and as JSON with device, dtype, threads and date."""
