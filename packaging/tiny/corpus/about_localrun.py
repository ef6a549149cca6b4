"""What the model knows about localrun: tasks with their commands, and questions with their answers. Pure.

Keep in step with the README: a changed command is a reason to train again.
"""

from __future__ import annotations

from random import Random

from tiny.corpus.phrasing import Exchange, entries, phrases, say

HOW_TO_FORMS = phrases(
    """
how do I {task}? | how do I {task}? | how can I {task}? | how to {task}? | how to {task} | how do you {task}? |
how do I {task} with localrun? | how can I {task} in localrun? | what is the command to {task}? |
which command do I use to {task}? | what command lets me {task}? | I want to {task}. | tell me how to {task}. |
can you tell me how to {task}? | can you explain how to {task}? | what do I type to {task}? |
is there a way to {task}? | show me how to {task}. | {task}?
"""
)

HOW_TOS = entries(
    """
list models | list the models | list my models | see which models I have | see all models | show all models |
find out which models are installed | see the available models
= Type `localrun list` to see the models that you have.

start the daemon | start the server | run the daemon | run the server | start localrun as a server | serve models |
launch the daemon | start serving
= Type `localrun serve` to start the daemon.

run a model | chat in the terminal | talk to a model | start a chat | chat with a model | run tiny | chat with you |
use a model | start a model | ask a model something
= Type `localrun run tiny` to chat with a model, or `localrun run tiny "Hello"` for one answer.

run a GGUF file | run my own model | use a gguf file | load a model from a file | open a GGUF file |
run a model file | use my own GGUF
= Type `localrun run ./file.gguf`: the file runs in place, without a copy.

see running models | see which models are loaded | list loaded models | see what is running | see the loaded models |
check which model is loaded | show the running models
= Type `localrun ps` to see which models are loaded.

show a model | see the details of a model | get information about a model | inspect a model | see a model's template |
see the parameters of a model | show model details
= Type `localrun show tiny` to see the details of a model.

stop a model | unload a model | free the memory of a model | unload tiny | remove a model from memory | stop tiny
= Type `localrun stop tiny` to unload a model.

stop the daemon | stop the server | end the daemon | shut down the daemon | quit the daemon | kill the daemon |
stop localrun
= Type `localrun stop --daemon` to end the daemon.

open the TUI | open the terminal interface | start the TUI | open the chat screen | start localrun | open localrun |
use localrun | launch the TUI | get started
= Type `localrun`: it opens the terminal interface with a chat.

change the port | use another port | set the port | pick a different port | serve on another port
= Type `localrun serve --port 8080`, or set LOCALRUN_PORT.

change the host | change the address | bind another address | set the host
= Type `localrun serve --host ADDRESS`, or set LOCALRUN_HOST. By default only this computer can connect.

set the number of threads | change the threads | use more threads | set threads
= Type `localrun serve --threads N`, or set LOCALRUN_THREADS.

set the number of slots | change the slots | allow more requests at once | set slots
= Type `localrun serve --slots N`, or set LOCALRUN_SLOTS.

change the data folder | move the data | set the home folder | store data somewhere else
= Set LOCALRUN_HOME: it puts data, cache, config and state under one folder.

see the monitor | open the monitor | watch requests | see the requests | see running requests | monitor the daemon |
see the graph
= Press F2 in the terminal interface to open the monitor with all requests.

open the model picker | choose another model | switch models | change the model | pick a model | select a model
= Press F3 in the terminal interface to pick a model.

go back to the chat | get back to the chat | open the chat | return to the chat
= Press F1 in the terminal interface to go to the chat.

cancel a request | stop an answer | cancel an answer | stop a running request | stop generating | interrupt you
= Press Esc in the chat to stop an answer, or cancel the request in the monitor.

leave the chat | quit the REPL | exit the REPL | leave the REPL | end the chat
= Type /bye to leave the chat.

clear the chat | clear the conversation | start a new conversation | forget the conversation | reset the chat
= Type /clear to start a new conversation.

change a parameter in the REPL | set the temperature | change the temperature | set a parameter | change the options
= Type /set in the chat, for example /set temperature 0.7.

use the OpenAI API | connect an OpenAI client | connect my editor | use localrun from Python | use the API |
connect an editor | call the API
= Point your client at http://127.0.0.1:11434/v1: localrun speaks the OpenAI API.

use the Ollama API | connect an Ollama client | use it with Ollama tools | connect Ollama tools
= Point your client at http://127.0.0.1:11434: localrun speaks the Ollama API.

get JSON output | use it in a script | get json | parse the output in a script
= Add `--json` to the command.

get help | see all commands | list the commands | see the help | find the commands
= Type `localrun --help` to see all commands.

install localrun | set up localrun | get localrun
= In the source folder type `make run`, or install it with `uv tool install .`.

see metrics | get metrics | use Prometheus | read the metrics | monitor with Prometheus
= The daemon has Prometheus metrics at /metrics.

see tokens per second | see the speed | measure the speed | see how fast you are
= Look at the footer of the chat: it shows live tokens per second.
"""
)

QUESTIONS = entries(
    """
what is localrun? | what's localrun? | tell me about localrun | what does localrun do? | explain localrun |
what is this program? | what is this? | describe localrun | what is localrun for? | what can localrun do? |
do you know localrun? | localrun? | what is local run?
= localrun runs language models on your own computer: a daemon, an API for editors, and a chat in the terminal.

which port does localrun use? | what is the API port? | what port do you use? | what is the port? | which port? |
what's the default port? | on which port does the daemon listen? | what port does the daemon use? | port? |
what is the address of the API? | what is the default address? | where does the API listen? |
what is the URL of the API?
= The daemon listens on 127.0.0.1, port 11434.

which APIs does localrun have? | what APIs do you support? | which API does it speak? | is there an API? |
does localrun have an API? | what API is there? | is localrun compatible with OpenAI? |
is localrun compatible with Ollama? | does it work with OpenAI clients?
= localrun speaks the Ollama API and the OpenAI API, on port 11434.

what is a GGUF file? | what is GGUF? | which model files can I use? | which format do models have? |
what file format does localrun use? | what models can I run? | which models work? | which models can localrun run?
= localrun runs GGUF files, the model format of llama.cpp.

what is llama.cpp? | which engine does localrun use? | what does localrun use inside? |
is localrun based on llama.cpp? | what runs the models?
= localrun uses llama.cpp to run models.

what commands are there? | which commands does localrun have? | what are the commands? | list all commands |
commands? | what commands do you know? | which commands are there?
= The commands are `localrun run`, `serve`, `list`, `ps`, `show` and `stop`.

is my data safe? | is it private? | do you send my data anywhere? | is this private? | does localrun send data? |
do you need the internet? | does localrun work offline? | do I need internet? | who can see my messages? |
is localrun private? | is localrun safe?
= All runs on your own computer: localrun listens only on this machine and sends nothing away.

does localrun use the GPU? | can I use my GPU? | do I need a GPU? | does it run on the CPU? |
do I need a graphics card? | does localrun support CUDA? | does localrun support Metal?
= A GPU helps but is not needed: llama.cpp also runs on the CPU.

is localrun free? | what is the license? | what license do you have? | is localrun open source? |
what does localrun cost?
= localrun and I are free, under the MIT license.

what is batching? | can you answer several requests at once? | can localrun handle many requests? |
does localrun batch requests? | what is continuous batching? | how many users can you serve?
= localrun answers several requests at once: they join and leave a batch at every step.

what is the prefix cache? | what is prefix caching? | does localrun cache prompts? |
why is the second answer faster?
= localrun keeps what it has computed for a prompt, so that the same beginning is not computed again.

what is your context length? | how much can you remember? | how long is your context? | what is your context size? |
how many tokens can you read?
= My context is 4096 tokens.

what is the daemon? | what does the daemon do? | what is a daemon? | what does localrun serve do? | what is serve?
= The daemon loads models and serves them over HTTP to the chat, your editor and your scripts.

what is the TUI? | does localrun have a user interface? | is there a graphical interface? |
what is the terminal interface?
= The TUI is the screen in your terminal: a chat, a monitor and a model picker.

what do the F-keys do? | what are the keys? | which keys are there? | what does F1 do? | what does F2 do? |
what does F3 do? | what are the shortcuts? | which function keys are there? | what keys can I press?
= F1 opens the chat, F2 the monitor and F3 the model picker.

what does localrun list do? | what is localrun list?
= `localrun list` shows the models that you have.

what does localrun ps do? | what is localrun ps?
= `localrun ps` shows which models are loaded.

what does localrun show do? | what is localrun show?
= `localrun show MODEL` shows the details of a model.

what does localrun stop do? | what is localrun stop?
= `localrun stop MODEL` unloads a model, and `localrun stop --daemon` ends the daemon.

what does localrun run do? | what is localrun run?
= `localrun run MODEL` opens a chat, or answers one prompt.

what are tokens? | what is a token? | what does tokens per second mean?
= A token is a piece of a word. Models read and write text token by token.

what is a language model? | what is an LLM? | how do you work? | how do language models work?
= A language model guesses the next token again and again. I am a very small one.

is there a health check? | how do I know that the daemon is up? | is the daemon running? | what is /health?
= Ask http://127.0.0.1:11434/health to see if the daemon is up.

is localrun like Ollama? | what is the difference to Ollama? | is localrun the same as Ollama? | what is Ollama?
= Ollama also runs models at home. localrun speaks its API and batches requests in its own way.

where are my models? | where are models stored? | where is the data folder? | where does localrun keep its files?
= localrun keeps its files in your user folders, or all under LOCALRUN_HOME when you set it.

what are the chat commands? | which slash commands are there? | what slash commands exist? | what is /set?
= In the chat you can type /set, /show, /clear and /bye.
"""
)


def exchange(random: Random) -> Exchange:
    """A question about localrun, and its answer."""
    if random.random() < 0.5:
        tasks, answers = random.choice(HOW_TOS)
        return Exchange(say(random, random.choice(HOW_TO_FORMS).replace("{task}", random.choice(tasks))), answers[0])
    questions, answers = random.choice(QUESTIONS)
    return Exchange(say(random, random.choice(questions)), answers[0])
