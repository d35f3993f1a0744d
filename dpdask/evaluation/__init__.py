"""How far a release is from its original. CONFIDENTIAL: it reads private rows without noise, so its results must not be published.

Only the data's steward may see what these functions return, unless the docstring says that they
read no rows. The command line imports them for `dpdask report`, and nothing else in the package
does. What may be published about a release is in its card (`dpdask.mechanisms.card`).
"""
