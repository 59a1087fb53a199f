"""Episodes of several turns: environments, tools, and the tokens between the turns."""
