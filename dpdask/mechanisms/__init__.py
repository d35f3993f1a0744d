"""Mechanisms: from parameters and statistics of a table to a fitted release. Each has a package of its own."""
