"""The page and the metadata that come with a release: functions of its card and its released shards, so they cost no ε."""

from dpdask.page.render import make_croissant, make_page, make_plan_page, write_page

__all__ = ["make_croissant", "make_page", "make_plan_page", "write_page"]
