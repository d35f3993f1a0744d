"""The analyst's front door: what a release supports, with standard errors and limits, from its folder and its card alone."""
