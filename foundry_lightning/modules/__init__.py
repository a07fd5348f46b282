"""The LightningModules: each training_step reads like its paper."""
