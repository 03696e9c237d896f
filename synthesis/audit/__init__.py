"""Audit of stored data: re-derives from records alone what their makers claim. It shares no checker with them."""
