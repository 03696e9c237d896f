"""The original's released records, read and written."""
