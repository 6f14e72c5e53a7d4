"""One run on several processes, its ranks: who they are, what they tell each other, and how they begin and end together."""
