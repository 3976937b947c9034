"""Where the time of a model's calls goes: operators, their rates, idle time, copies; and where compiling breaks off."""
