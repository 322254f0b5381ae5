"""Rules on the tokens of outputs, which are exact under speculation too."""
