"""SGLang plugin of the tests: writes down what happens inside a scheduler, and breaks a policy on demand."""
