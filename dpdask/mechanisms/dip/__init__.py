"""Distribution-invariant privatisation: each row is randomised on its own, and the distribution of the table is preserved."""
