"""What each field of a request's body does, for the document: the one place where it is said to users.

A key is a field's name, or `Struct.field` where the same name means something else in one struct. A test holds that
every field of every body has a note, and that no note is left over.

Pure data.
"""

from __future__ import annotations

_SERVICE = {
    "lane": "interactive, default or batch: who goes first where slots are short. Also a header.",
    "latency": "How long other prompts may hold this stream up between two tokens: interactive, balanced, throughput, "
    "or milliseconds. Also a header.",
    "deadline_s": "Seconds from arrival until the first token is wanted; the answer is 429 at once where that "
    "cannot be. Also a header.",
    "keep_alive": "How long the model stays loaded afterwards: seconds, or a duration such as `30m` or `1h30m`; "
    "negative for ever, 0 not at all.",
    "speculation": "Whether tokens are drafted ahead, so that several come from one step: on, off, true or false; "
    "without it the setting of the model. Also a header. Has no effect on vectors.",
    "draft": "A smaller model that drafts for this request instead of the model's own draft model: the name of one "
    "that is here, or the path of a GGUF file. Its vocabulary must be the model's. It changes how fast the answer "
    "comes, not what it says, but for rounding. Empty is the model's own. On Ollama's routes also among the options. "
    "Embeddings have no drafts.",
    "model": "The model's name, as `localrun list` shows it, or the path of a GGUF file. Requests for text may add "
    "adapters, each with a scale if it is not 1: `model+adapter`, `model+a+b=0.5`.",
    "stream": "Whether the answer comes in pieces. Ollama's routes stream unless it is false, the others only if it is "
    "true.",
}

_SAMPLING = {
    "temperature": "0 always takes the most probable token. Without it the model's own parameter, else 1; on Ollama's "
    "routes 0.8.",
    "top_k": "Only the k most probable tokens; 0 or -1 is off.",
    "top_p": "Only the most probable tokens that together have this probability.",
    "min_p": "Only tokens that have at least this fraction of the most probable one's probability.",
    "typical_p": "Locally typical sampling; 1 is off.",
    "repeat_penalty": "Divides the score of tokens that were there lately; 1 is off.",
    "repetition_penalty": "vLLM's name of `repeat_penalty`; that one counts if both are there.",
    "repeat_last_n": "How many tokens count as lately; -1 is the whole context, 0 is off.",
    "presence_penalty": "Subtracted once from the score of tokens that were there lately.",
    "frequency_penalty": "Subtracted from the score of tokens for each time that they were there lately.",
    "logit_bias": "Added to the score of tokens, by their id or their text: an object, or pairs; -100 and false ban.",
    "mirostat": "Mirostat sampling, version 1 or 2; 0 is off.",
    "mirostat_tau": "Mirostat's target surprise.",
    "mirostat_eta": "Mirostat's rate of learning.",
    "dry_multiplier": "DRY: a penalty for tokens that would go on with a repetition; it is this, times `dry_base` for "
    "each token that the repetition is longer than `dry_allowed_length`. 0 is off.",
    "dry_base": "How fast the penalty of DRY grows with the length of the repetition.",
    "dry_allowed_length": "Repetitions up to this many tokens have no penalty of DRY.",
    "dry_penalty_last_n": "How many tokens DRY looks at; -1 is the whole context, 0 is off. Without it 64.",
    "dry_sequence_breakers": 'A text or up to 16 that end a repetition for DRY; without it a line break, `:`, `"` and '
    "`*`.",
    "top_n_sigma": "Only tokens whose score is within so many standard deviations of the highest one; 0 or -1 is off.",
    "xtc_probability": "XTC: how often the most probable tokens are left out, all but the last one that has "
    "`xtc_threshold`; 0 is off.",
    "xtc_threshold": "The probability from which XTC leaves tokens out; above 0.5 it never does.",
    "seed": "Same seed, same prompt: same answer, but for rounding. -1 is random.",
    "stop": "A text or up to 64, at which the answer ends; they are not part of it.",
    "lora": "Adapters for this request, up to 8: LoRA files and control vectors. They count over those in the model's "
    "name, and the model's own stay in effect unless they are listed with another scale.",
    "LoraEntry.id": "A place in `GET /lora-adapters`, as llama-server has it; or the adapter's name, its digest "
    "(`sha256:...`) or the path of its file.",
    "LoraEntry.scale": "Its strength, from -100 to 100; 0 is without it.",
    "ignore_eos": "Whether to go on after the model's own end, up to the limit. For measurements.",
    "cache_prompt": "False computes the whole prompt anew, and keeps nothing of the request in the cache.",
}

_TEXT = {
    "n": "How many answers. All share the computed prompt.",
    "max_tokens": "Most tokens to generate; without it, or with -1, until the model ends or the context is full.",
    "max_completion_tokens": "The newer name of `max_tokens`; counts if both are there.",
    "max_output_tokens": "The name of `max_tokens` in responses; thinking counts.",
    "stream_options": "What else the stream tells.",
    "StreamOptions.include_usage": "Whether the last chunk has the usage.",
    "messages": "The conversation, oldest first. Pictures and sound stand among the parts of its content, with models "
    "that take them. An assistant's last message is gone on with on Ollama's and "
    "Anthropic's routes, and with `prefix` on OpenAI's.",
    "prompt": "What the answer is to.",
    "CompletionBody.prompt": "A text, several, token ids, or several lists of them; each gets `n` answers, up to 64 in "
    "all.",
    "InfillBody.prompt": "What stands right before the cursor, after `input_prefix`.",
    "ResponsesBody.prompt": "Refused: there are no stored prompts.",
    "suffix": "What stands after the gap. Only with models that have FIM tokens.",
    "echo": "Whether the answer begins with the prompt; with `logprobs` its log-probabilities come along.",
    "CompletionBody.max_tokens": "Most tokens to generate; 0 only with `echo`. Without it, or with -1, until the "
    "model ends or the context is full.",
    "best_of": "How many candidates to generate, of which the `n` most probable are sent.",
    "logprobs": "Whether each token's log-probability comes along; in `/v1/completions` a number of alternatives.",
    "top_logprobs": "How many alternatives each token comes with.",
    "response_format": "text, json_object, or json_schema with a schema that the answer keeps to.",
    "json_schema": "A JSON schema that the answer keeps to.",
    "grammar": "A GBNF grammar that the answer keeps to; not together with the other formats.",
    "tools": "The functions that the model may call.",
    "ResponsesBody.tools": "The functions that the model may call. Tools that OpenAI runs itself are left out.",
    "tool_choice": "auto, none, required, or an object that names a function or allows some. What is forced is "
    "constrained while it is decoded, so its arguments always parse.",
    "MessagesBody.tool_choice": "auto, any, tool with a name, or none.",
    "CountBody.tool_choice": "auto, any, tool with a name, or none.",
    "parallel_tool_calls": "False allows one call in an answer at most.",
    "functions": "The older form of `tools`.",
    "function_call": "The older form of `tool_choice`: auto, none, or an object that names a function.",
    "reasoning_effort": "How much to think: none, minimal, low, medium, high, xhigh, max or ultra; the nearest level "
    "counts that the model's template knows. No effect with models that do not think.",
    "enable_thinking": "False for no thinking, as `reasoning_effort` none.",
    "reasoning_budget": "0 for no thinking; other budgets have no effect.",
    "thinking_budget": "0 for no thinking; other budgets have no effect.",
    "modalities": "Only text is possible: what an answer is made of.",
    "audio": "Refused: answers are text. What a model is to hear is an `input_audio` part of a message.",
    "prediction": "A text that much of the answer is expected to be like, such as the file that is to be edited: its "
    "tokens are drafts, so the answer comes faster where it repeats them.",
    "verbose": "Whether the answer has the prompt that the model got, as `__verbose.prompt`; llama-server's.",
    "continue_final_message": "Whether the answer goes on where the last message, the assistant's, ends; vLLM's.",
    "add_generation_prompt": "False only together with `continue_final_message`, or where nothing is generated.",
    "chat_template_kwargs": "Variables for the model's chat template, such as `enable_thinking`. `messages`, `tools`, "
    "`add_generation_prompt` and `*_token` are refused: they are the template's own.",
    "documents": "Documents for templates that know them.",
    "RerankBody.documents": "Texts, or objects with `text`.",
    "RerankBody.texts": "The documents in TEI's form, in which the answer comes then: a list of scores.",
    "RerankBody.return_text": "With `texts`: whether they come back with their scores.",
    "EmbeddingsBody.content": "As `input`, by llama-server's name.",
    "random_seed": "Mistral's name of `seed`.",
    "input_prefix": "What stands before the cursor.",
    "input_suffix": "What stands after the cursor.",
    "input_extra": "Other files, for context.",
    "n_predict": "llama-server's name of `max_tokens`.",
    "LlamaCompletionBody.prompt": "A text, token ids, both in one list, an object with pictures or sound "
    "(`prompt_string` and `multimodal_data`), or a list of such prompts; up to 64 answers in all.",
    "TokenizeBody.prompt": "vLLM's name of `content`; the answer then has what vLLM's has.",
    "add_special_tokens": "With `prompt`: whether the model's BOS token comes first.",
    "return_token_strs": "Whether the text of each token comes along, as `token_strs`.",
    "LmStudioCompletionBody.prompt": "As in `/v1/completions`.",
    "ttl": "Seconds for which the model stays loaded after the request, as `keep_alive`.",
    "draft_model": "A draft model, as `draft`.",
    "n_probs": "With how many alternatives each token comes, in `completion_probabilities`; 0 is without.",
    "return_tokens": "Whether the token ids come along; in a stream they always do.",
    "return_progress": "Whether a stream tells how much of the prompt is computed.",
    "timings_per_token": "Whether each chunk has the timings so far.",
    "NamedModel.model": "The model to load or unload, as `localrun list` shows it.",
    "samplers": "Which samplers count: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature; or "
    "one text of their letters, edskypmxt. They are always applied in this order; the header `X-Localrun-Ignored` says "
    "where another one was wanted.",
    "dynatemp_range": "Refused, but for 0.",
    "adaptive_target": "Refused, unless it is negative.",
    "min_keep": "Refused, but for 0.",
    "n_indent": "Refused, but for 0.",
    "t_max_predict_ms": "Refused, but for -1.",
    "grammar_lazy": "True is refused.",
    "post_sampling_probs": "True is refused: probabilities are the model's own.",
    "LlamaCompletionBody.multimodal_data": "Refused here: it belongs into a `prompt` that is an object.",
    "LlamaCompletionBody.image_data": "Refused: pictures belong into a `prompt` that is an object.",
    "LlamaCompletionBody.images": "Refused: pictures belong into a `prompt` that is an object.",
    "content": "A text, or texts and token ids in one list.",
    "add_special": "Whether the model's BOS token is put in front, as it is to prompts.",
    "parse_special": "Whether the names of control tokens become those tokens.",
    "with_pieces": "Whether each token comes with its text, or with its bytes where these are no whole character.",
    "DetokenizeBody.tokens": "Token ids; control tokens become their names.",
    "response_fields": "Only these fields of the answer, such as `content` or `timings/predicted_n`.",
}

_OLLAMA = {
    "name": "Older name of `model`.",
    "ModelBody.verbose": "Whether the tensors are listed.",
    "truncate": "False refuses what is too long, where otherwise a chat loses its oldest messages and a text its end.",
    "EmbeddingsBody.truncate": "True cuts the end of an input that is too long, which is an error otherwise.",
    "shift": "Has no effect: an answer ends where the context does.",
    "options": "How to sample, and limits.",
    "EmbedBody.options": "Has no effect on vectors.",
    "LegacyEmbeddingsBody.options": "Has no effect on vectors.",
    "format": "`json`, or a JSON schema that the answer keeps to.",
    "think": "Whether to think: true, false, or low, medium, high or max. Only with models that think.",
    "_debug_render_only": "True answers with the prompt that the template makes, and generates nothing.",
    "system": "A system prompt, instead of the model's own.",
    "template": "A Jinja chat template instead of the model's own; Go templates are left out.",
    "context": "The `context` of the former answer, whose conversation goes on.",
    "raw": "Whether the prompt goes to the model as it is, without a template. Special tokens in it count.",
    "images": "Pictures (PNG, JPEG, GIF, BMP, WebP) and recordings (WAV, FLAC, OGG, MP3) in base64, with or without "
    "`data:...;base64,` before; up to 16 in a request. Only with models that have a projector for them. They stand "
    "before the text, or where it says `[img]`.",
    "num_predict": "Most tokens to generate; negative until the model ends.",
    "num_keep": "How many tokens from the start stay when a prompt is cut; -1 all.",
    "num_ctx": "Tokens that the request has room for at least. If the loaded model has less, it is loaded anew, and "
    "requests that run end first. Never more than the model was trained for, unless `rope_frequency_scale` extends it.",
    "num_batch": "Has no effect; `--batch-tokens` of the daemon.",
    "num_gpu": "Layers on the GPU; -1 as many as fit. A loaded model with another number stays for other requests.",
    "main_gpu": "Has no effect.",
    "num_thread": "Has no effect in a request; as a model's own parameter, the threads that it is loaded with.",
    "kv_type": "Type of the KV cache. A loaded model with another type stays for other requests.",
    "slots": "Has no effect in a request; as a model's own parameter, how many requests run at once.",
    "kv_cells": "Has no effect in a request; as a model's own parameter, the cells that its slots share.",
    "rope_scaling": "How positions beyond the trained context are brought within it.",
    "rope_frequency_base": "Base of the rotary position embedding; 0 is the model's own.",
    "rope_frequency_scale": "Context extension (RoPE scaling): 0.25 is four times the trained context; 0 is the "
    "model's own.",
    "yarn_orig_ctx": "With yarn: the context of the first training; 0 is the model's own.",
    "draft_num_predict": "Has no effect: how much is drafted is decided for each step, by what it is worth.",
    "use_mmap": "Has no effect.",
    "insecure": "Whether plain http to a registry elsewhere is allowed.",
    "projector": "The projector to fetch with the model, by its file name or type; none leaves it out.",
    "source": "The model's name.",
    "destination": "The second name.",
    "from": "The model or the path of the file that it is made of. An adapter's gives it another name.",
    "files": "Uploaded files, by name: their digests.",
    "adapters": "Uploaded adapters (LoRA or control vectors), by name: their digests. One without `from` and `files` "
    "gets a name of its own.",
    "parameters": "Parameters that count where a request says nothing.",
    "CreateBody.messages": "Messages that every conversation begins with.",
    "license": "The licence's text, or several.",
    "requires": "A version; kept and shown.",
    "quantize": "The type to convert the weights to, such as `q4_K_M`.",
    "quantization": "Older name of `quantize`.",
    "modelfile": "A Modelfile instead of the other fields.",
    "modelfile_folder": "The folder that paths in `modelfile` count from.",
    "CreateBody.draft": "The draft model: the name of one that is here, or the path of a GGUF file. Empty for none.",
    "draft_files": "Refused: name a model that is here as `draft`.",
    "draft_quantize": "Refused: the draft model is used as it is.",
    "renderer": "Refused: the chat template renders.",
    "parser": "Refused: the parser is chosen by the chat template.",
    "remote_host": "Refused: models run here.",
}

_OTHERS = {
    "ResponsesBody.input": "A text, or items: messages, function calls and their outputs, reasoning, references.",
    "EmbedBody.input": "A text or up to 2,048. An object is a text with pictures or sound.",
    "EmbeddingsBody.input": "A text, texts, token ids (with texts between them), or lists of them, up to 2,048. An "
    "object is a text with pictures or sound.",
    "EmbeddingsBody.messages": "One input, instead of `input`, which the model's chat template makes a text of.",
    "EmbeddingsBody.add_generation_prompt": "Whether the beginning of an answer follows the messages; false if not "
    "given.",
    "EmbeddingsBody.continue_final_message": "Whether the last message, an assistant's, is left open.",
    "InfillBody.images": "Refused: no model that fills in the middle sees.",
    "InfillBody.multimodal_data": "Refused: no model that fills in the middle sees.",
    "encoding_format": "float or base64.",
    "dimensions": "How many numbers of each vector; it has length 1 again afterwards.",
    "query": "What the documents are to answer.",
    "top_n": "How many of the best.",
    "return_documents": "Whether the documents' texts come along.",
    "instructions": "A system prompt.",
    "previous_response_id": "The response whose conversation goes on.",
    "store": "False does not keep the response.",
    "text": "The shape of the answer, in `format`.",
    "reasoning": "How much to think, and whether the thinking comes as a summary.",
    "include": "`message.output_text.logprobs`; others have no effect.",
    "metadata": "Kept with the response.",
    "truncation": "auto leaves out the oldest messages of a conversation that is too long, and the header "
    "`X-Localrun-Truncated` says how many; disabled refuses it.",
    "background": "True is refused.",
    "conversation": "Refused; use `previous_response_id`.",
    "thinking": "An object whose `type` is enabled, adaptive or disabled. `budget_tokens` has no effect. A model that "
    "does not think answers all the same, and the header `X-Localrun-Ignored` says so.",
    "output_config": "`effort` of the thinking, and `format` with a JSON schema.",
    "output_format": "Older place of `output_config.format`.",
    "stop_sequences": "Up to 64 texts at which the answer ends.",
    "MessagesBody.max_tokens": "Most tokens to generate; 0 reads the prompt into the cache and says nothing.",
    "MessagesBody.system": "A system prompt: a text, or blocks of text.",
    "CountBody.system": "A system prompt: a text, or blocks of text.",
    "min_age_s": "How old an uploaded file must be that no model names.",
    "input_file_id": "An uploaded file with the purpose batch: a request in each line, with `custom_id`, `method` "
    "(POST), `url` (the endpoint) and `body`. All have one model.",
    "endpoint": "The route of all requests: /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses.",
    "completion_window": "How long it may take; what is not computed by then expires. 24h, or another time up to 30d.",
    "output_expires_after": "When the results are deleted, in seconds after they were written; never without it.",
    "BatchBody.metadata": "Kept with the batch.",
    "requests": "The messages: each has a `custom_id` of its own and, as `params`, the body of /v1/messages.",
    "partial_min_age_s": "How long ago a download must have been broken off.",
}

NOTES: dict[str, str] = _SERVICE | _SAMPLING | _TEXT | _OLLAMA | _OTHERS
# What many routes take; readers look for a route's own fields first.
COMMON = (_SERVICE.keys() | _SAMPLING.keys()) - {"model", "stream"}
# Structs inside bodies whose fields are explained by their own text.
INNER = frozenset({"LoraEntry", "Options", "StreamOptions"})


def note_of(struct: str, field: str) -> str:
    """The note of a body's field; empty for a field of any other struct."""
    own = NOTES.get(f"{struct}.{field}")
    if own is not None:
        return own
    return NOTES.get(field, "") if struct.endswith("Body") or struct in INNER else ""
