"""The Gaussian copula: synthetic records with the one- and two-way structure of noisy tables."""
