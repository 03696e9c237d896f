"""Ten worlds of the offline teacher, each a description: tables, tools over them, what must hold, and tasks.

`descriptions.py` says what a description is, `drawing.py` makes a world and a task of one; the others are the ten.
"""
