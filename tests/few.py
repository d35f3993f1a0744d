"""Which cases of a test are in the default set."""


def choose_few(cases, n_cases=None):
    """Return the numbers of the cases of a test that are in the default set.

    Parameters
    ----------
    cases
        Which value each parameter has.
    n_cases
        How many cases are wanted: they are evenly spaced. If not given, there are as few as hold each value of each parameter.
    """
    if n_cases is not None:
        return {number * len(cases) // n_cases for number in range(n_cases)}
    chosen = set()
    missing = {value for case in cases for value in case.items()}
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & cases[number].items()))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen
