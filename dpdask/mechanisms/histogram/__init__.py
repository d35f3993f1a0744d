"""The perturbed histogram: noise in every cell of a joint histogram, released as weighted cells or synthetic rows."""
