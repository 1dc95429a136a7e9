"""What proposes: the early exit's chains and trees, prompt lookup; how long, from which exit, and whether at all."""
