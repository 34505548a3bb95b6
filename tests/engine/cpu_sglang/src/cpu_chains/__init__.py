"""SGLang plugin of the tests: EAGLE-3 chains on `--device cpu --attention-backend torch_native`."""
