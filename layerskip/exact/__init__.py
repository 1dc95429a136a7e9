"""What makes the output the model's: scores under the model's own processors, the accept rules and their proofs."""
