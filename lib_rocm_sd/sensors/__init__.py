"""What a card tells of its power and clocks while something runs."""
