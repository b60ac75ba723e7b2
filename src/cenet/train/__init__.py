"""Training: the recipes of the paper's Appendix E, and the loop that runs them."""

from cenet.extras import require

require("train")

from cenet.train.recipes import RECIPES, Recipe, find_recipe

__all__ = ["RECIPES", "Recipe", "find_recipe"]
