"""The layer below all others: settings, errors, files and buckets, the terminal, services over HTTP.

It imports no other package of the project. The sandbox needs of it what is written with the standard library alone.
"""
