"""How far a release is from its original. CONFIDENTIAL: it reads private rows without noise, so its results must not be published.

Only the data's steward may see what these functions return, unless the docstring says that they read no rows. Nothing else in
the package imports them. What may be published about a release is in its card (`dpdask.mechanisms.card`).
"""
