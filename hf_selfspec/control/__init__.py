"""What drafts when: measured costs, running rates, and the choice that follows from them."""
