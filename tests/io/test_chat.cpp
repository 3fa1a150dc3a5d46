// Chat templates: what expressions and tags write, what is refused by name, that every rendering ends, and where
// answers are. test_chat_templates.py compares whole conversations with transformers.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "io/chat/chat_format.h"
#include "io/data/corpus.h"
#include "io/data/record.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/tokenizer_cases.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kChat =
    R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": " U é\n", "n": 2.50, "items": 1},)"
    R"({"role": "assistant", "content": "A", "reasoning": "R", "name": null}], "tools": [{"b": [1, true, null], "a": "\"é"}]})";

ChatFormat format_of(const std::string& text) { return {"t.jinja", {{"default", text}}, {{"bos_token", "<s>"}}}; }

Conversation chat_of(const std::string& line) {
  Conversation chat = read_conversation(parse_json(line, "a.jsonl"), "a.jsonl");
  chat.bytes = line.size();
  return chat;
}

std::string rendered(const std::string& text, const std::string& line = kChat) {
  return format_of(text).text(chat_of(line));
}

std::vector<std::string> parts_of(const ChatFormat& format, const std::string& line, ChatLearn learn) {
  const Record record = parse_record(line, "a.jsonl: line 3", {std::make_shared<const ChatFormat>(format), learn});
  std::vector<std::string> parts;
  for (const Record::Part& part : record.parts) parts.push_back((part.learned ? "+" : "-") + part.text);
  return parts;
}

}  // namespace

TEST_CASE("chat: expressions and tags write what Jinja writes", "[data][chat]") {
  // Template, and what jinja2 3.1 writes with transformers' settings and filters.
  const std::pair<const char*, const char*> cases[] = {
      {"{{ bos_token }}{{ missing }}|{{ none }}|{{ true }}|{{ 7 }}|{{ 1.0 }}|{{ 1e22 }}|{{ 1e-5 }}",
       "<s>|None|True|7|1.0|1e+22|1e-05"},
      {"{{ 7 // -2 }} {{ 7 % -2 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ -2 ** 2 }} {{ 1 + 2 * 3 - 4 }}", "-4 -1 3.5 1024 4 3"},
      {"{{ 'a' ~ 1 ~ none }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ (1,) }} {{ () }}", "a1None abab [1, 2] (1,) ()"},
      {"{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 2 == 2.0 }} {{ true == 1 }} {{ 'a' in 'bab' }} {{ 3 not in [1, 2] }}",
       "True False True True True True"},
      {"{{ not 1 == 2 }} {{ 0 or 'x' }} {{ '' and 'y' }}|{{ 'z' if missing }}|{{ 1 if 0 else 2 }}", "True x ||2"},
      {"{{ \"it's\" ~ 'tab\\t\\x41\\u00e9\\101\\d' }}{{ 'a' 'b' }}", "it'stab\tAéA\\dab"},
      {"{{ ['it\\'s', 'q\"', 'é\\n', none, {'k': 1.5}] }}", "[\"it's\", 'q\"', 'é\\n', None, {'k': 1.5}]"},
      {"{{ messages[-1].role }} {{ messages[1:][0]['role'] }} {{ messages[::-1][0].role }} {{ 'aébc'[1:3] }} {{ "
       "'abc'[::-2] }}",
       "assistant user assistant éb ca"},
      {"{{ messages[9] is defined }} {{ messages[0].x is none }} {{ messages[1].n }} {{ messages[2].reasoning_content "
       "}}",
       "False False 2.5 R"},
      {"{{ 'name' in messages[2] }} {{ messages[2].get('name', 'd') }} {{ messages[1]['items'] }} {{ tools is not none "
       "}}",
       "False d 1 True"},
      {"{{ tools | tojson }}{{ tools[0] | tojson(indent=1) }}{{ [] | tojson(indent=2) }}{{ 'é' | "
       "tojson(ensure_ascii=true) }}",
       "[{\"b\": [1, true, null], \"a\": \"\\\"é\"}]{\n \"b\": [\n  1,\n  true,\n  null\n ],\n \"a\": "
       "\"\\\"é\"\n}[]\"\\u00e9\""},
      {"{{ messages[1].content | trim }}|{{ 'xxaxx'.strip('x') }}|{{ ' a b '.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ "
       "'a,b,c'.rsplit(',', 1) }}",
       "U é|a|['a', 'b']|['a', 'b,c']|['a,b', 'c']"},
      {"{{ 'abcabc'.replace('b', 'x', 1) }} {{ 'é-b'.find('b') }} {{ 'ab'.startswith(('x', 'a')) }} {{ "
       "'a\\nb'.splitlines() }} {{ 'hELLO'.capitalize() }}",
       "axcabc 2 True ['a', 'b'] Hello"},
      {"{{ messages | map(attribute='role') | join('+') }} {{ messages | selectattr('role', 'in', ['user']) | list | "
       "length }} {{ [1, 0, 2] | select | list }} {{ messages | rejectattr('n', 'defined') | map(attribute='role') | "
       "list }}",
       "system+user+assistant 1 [1, 2] ['system', 'assistant']"},
      {"{{ {'B': 1, 'a': 2} | dictsort }} {{ {'x': 1}.items() | list }} {{ missing | default('d') }} {{ '' | "
       "default('e', true) }} {{ '42' | int + 1 }}",
       "[('a', 2), ('B', 1)] [('x', 1)] d e 43"},
      {"{{ 'a' is string }} {{ messages is sequence }} {{ tools[0] is mapping }} {{ missing is iterable }} {{ 4 is "
       "divisibleby 2 }} {{ true is number }} {{ 1 is not boolean }}",
       "True True True True True True True"},
      {"{% if messages | selectattr('role', 'equalto', 'none') %}generators are true{% endif %}",
       "generators are true"},
      {"{% for m in messages %}{{ loop.index }}{{ loop.revindex0 }}{{ loop.first }}{{ (loop.previtem or {}).role }}{{ "
       "(loop.nextitem or {}).role }};{% endfor %}",
       "12Trueuser;21Falsesystemassistant;30Falseuser;"},
      {"{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ loop.last }}{% else %}none{% endfor %}{% for x in "
       "[] %}{% else %}empty{% endfor %}",
       "bTrueempty"},
      {"{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% "
       "endfor %}",
       "0134"},
      {"{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}{% set n = namespace(x=1) %}{% for i in [1] "
       "%}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
       "12"},
      {"{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set t %} in {{ a }} {% endset %}[{{ t }}]{% set u | trim %} y {% "
       "endset %}[{{ u }}]",
       "1x[ in 1 ][y]"},
      {"{% macro f(a, b='d') %}<{{ a }}{{ b }}>{% endmacro %}{{ f(1) }}{{ f(b=2, a=3) }}{{ f('x') | length }}",
       "<1d><32>4"},
      {"  {% if 1 %}  \n  a  \n  {%- endif %}  \n{{ 1 }}  \n  {# c #}\nb\n", "  \n  a  \n1  \nb"},
      {"a\r\n{%+ if 1 %}b{% endif +%}\nc {{- 'd' -}} \n e{#- x -#} f", "a\nb\ncdef"},
      {"{{ x | default(1) if false else {'a': {}} }}{{ '}}' }}{{ '%}' }}", "{'a': {}}}}%}"},
      {"{{ '<b>' | safe }}{{ ('<' | safe) ~ '>' }}", "<b><>"},
  };
  for (const auto& [text, expected] : cases) {
    INFO(text);
    CHECK(rendered(text) == expected);
  }
}

TEST_CASE("chat: what is not supported, or no template, is refused by name with its line", "[data][chat]") {
  const std::pair<const char*, std::vector<std::string>> cases[] = {
      {"a\n{% include 'x' %}", {"t.jinja: line 2", "{% include %} is not supported"}},
      {"{% call f() %}{% endcall %}", {"{% call %} is not supported"}},
      {"{% raw %}{% endraw %}", {"{% raw %} is not supported"}},
      {"\n\n{{ 1 | nice }}", {"line 3", "the filter nice is not supported"}},
      {"{{ 1 is nice }}", {"the test nice is not supported"}},
      {"{{ 'a'.format(1) }}", {"the method format of a string is not supported"}},
      {"{{ messages.append(1) }}", {"the method append of a list is not supported"}},
      {"{{ messages[0].pop('role') }}", {"the method pop of a dict is not supported"}},
      {"{{ messages[1].items }}", {"the method items of a dict is not called"}},
      {"{{ strftime_now('%d') }}", {"strftime_now is not supported", "another day", "chat_template_kwargs"}},
      {"{{ lipsum() }}", {"the function lipsum is not supported"}},
      {"{{ f(*messages) }}", {"arguments that begin with *"}},
      {"{{ tools | tojson(sort=1) }}", {"the argument sort is not supported"}},
      {"{{ '%s' % 1 }}", {"`%` of a string and an integer"}},
      {"{{ 'a' + 1 }}", {"`+` of a string and an integer"}},
      {"{{ missing.x }}", {"`missing`, which is undefined"}},
      {"{{ missing + 'a' }}", {"`missing`, which is undefined"}},
      {"{{ ('a' | safe) + 'b' }}", {"safe has marked"}},
      {"{{ 'É' | lower }}", {"lower of \"É\"", "ASCII"}},
      {"{{ 1 // 0 }}", {"divides by 0"}},
      {"{{ 9223372036854775807 + 1 }}", {"more than 64 bits"}},
      {"{{ range(100001) }}", {"range has more than 100000 items"}},
      {"{% set messages.x = 1 %}", {"`messages` is no namespace"}},
      {"{{ [namespace()] }}", {"a namespace in a list"}},
      {"{{ raise_exception('roles ' ~ 2) }}", {"line 1", "refuses the conversation: roles 2"}},
      {"{% for m in messages %}", {"{% endfor %} is missing"}},
      {"{% if 1 %}{% endfor %}", {"{% endif %} is needed, not `endfor`"}},
      {"{% endif %}", {"{% endif %} has no beginning"}},
      {"{{ 'a }}", {"the string that begins with '"}},
      {"a\n{{ 1", {"line 2", "{{ is not closed"}},
      {"{# a", {"the comment {# has no #}"}},
      {"{{ 1 1 }}", {"}} is needed, not `1`"}},
      {"{{ (1] }}", {"`]` without `[`"}},
      {"{{ a ? b }}", {"the character `?`"}},
      {"{% break %}", {"{% break %} outside of a loop"}},
      {"{{ '\\ud800' }}", {"no character"}},
      {"\xff", {"0xff", "UTF-8"}},
      {"{{ 0x1f }}", {"the number 0x"}},
  };
  for (const auto& [text, words] : cases) {
    INFO(text);
    check_error([&, text = text] { rendered(text); }, words);
  }
  const std::pair<const char*, std::vector<std::string>> chats[] = {
      {R"({"messages": [1]})", {"a.jsonl: message 1 is 1"}},
      {R"({"messages": [{"role": "user", "role": "x"}]})", {"a.jsonl", "role"}},
      {R"({"messages": [{"n": 18446744073709551615}]})", {"18446744073709551615", "64 bits"}},
      {R"({"messages": [{}], "tools": "x"})", {"`tools` is \"x\""}},
      {R"({"messages": [{}], "tools": ["x"]})", {"`tools` is [\"x\"]"}},
      {R"({"messages": [{}], "chat_template_kwargs": 1})", {"`chat_template_kwargs` is 1"}},
  };
  for (const auto& [line, words] : chats) check_error([&, line = line] { chat_of(line); }, words);
}

TEST_CASE("chat: a template that loops, grows or recurses ends with an error", "[data][chat]") {
  const std::string parens(500, '('), closed(500, ')');
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", {"steps", "does it loop?"}},
      {"{% for i in range(100000) %}{% for j in range(100000) %}{{ 'a' }}{% endfor %}{% endfor %}", {"does it loop?"}},
      {"{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
       {"does it loop?"}},
      {"{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
       {"does it loop?"}},
      {"{{ 'ab' * 9223372036854775807 }}", {"does it loop?"}},
      {"{% set n = namespace(s=[]) %}{% for i in range(9999) %}{% set n.s = [n.s] %}{% endfor %}",
       {"nest deeper than"}},
      {"{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}", {"recurses deeper than"}},
      {"{{ " + parens + "1" + closed + " }}", {"nests deeper than"}},
      {"{{ 1" + std::string(2000, '-') + "1 }}", {"nests deeper than"}},
      {"{{ tools | tojson(indent=1000000) }}", {"indent is 1000000"}},
  };
  for (const auto& [text, words] : cases) {
    INFO(text.substr(0, 100));
    check_error([&, text = text] { rendered(text); }, words);
  }
  // A larger conversation may take more.
  const std::string loop = "{% for m in messages %}{% for i in range(300) %}{% endfor %}{% endfor %}";
  std::string line = R"({"messages": [{"role": "user", "content": ")" + std::string(20'000, 'x') + "\"}";
  for (int i = 0; i < 300; ++i) line += R"(, {"role": "user"})";
  CHECK(rendered(loop, line + "]}").empty());
}

TEST_CASE("chat: answers are found without their header, to the end of the turn", "[data][chat]") {
  const std::string line = R"({"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},)"
                           R"({"role": "user", "content": "V"}, {"role": "assistant", "content": "B "}]})";
  const std::string turn = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</e>\n{% endfor %}";
  using Parts = std::vector<std::string>;
  const std::tuple<std::string, ChatLearn, Parts> cases[] = {
      {turn + "{% if add_generation_prompt %}<assistant>\n{% endif %}",
       ChatLearn::assistant,
       {"-<user>\nU</e>\n<assistant>\n", "+A</e>", "-\n<user>\nV</e>\n<assistant>\n", "+B </e>", "-\n"}},
      {turn + "{% if add_generation_prompt %}<assistant>\n{% endif %}",
       ChatLearn::last,
       {"-<user>\nU</e>\n<assistant>\nA</e>\n<user>\nV</e>\n<assistant>\n", "+B </e>", "-\n"}},
      {turn, ChatLearn::all, {"+<user>\nU</e>\n<assistant>\nA</e>\n<user>\nV</e>\n<assistant>\nB </e>\n"}},
      // Without a generation prompt the header is learned; one that ends otherwise has whole lines in common.
      {turn, ChatLearn::last, {"-<user>\nU</e>\n<assistant>\nA</e>\n<user>\nV</e>\n", "+<assistant>\nB </e>", "-\n"}},
      {turn + "{% if add_generation_prompt %}<assistant>\n<think>{% endif %}",
       ChatLearn::last,
       {"-<user>\nU</e>\n<assistant>\nA</e>\n<user>\nV</e>\n<assistant>\n", "+B </e>", "-\n"}},
      // What ends the text without a generation prompt begins like the header.
      {turn + "{% if add_generation_prompt %}<assistant>\n{% else %}</s>{% endif %}",
       ChatLearn::last,
       {"-<user>\nU</e>\n<assistant>\nA</e>\n<user>\nV</e>\n<assistant>\n", "+B </e>\n</s>"}},
      // White space ends a turn where nothing else does.
      {"{% for m in messages %}{{ m.content }}\n{{ '\n' }}{% endfor %}",
       ChatLearn::last,
       {"-U\n\nA\n\nV\n\n", "+B \n\n"}},
      {"{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %} {{ m.content }}$ {% endif %}{% "
       "endfor %}",
       ChatLearn::assistant,
       {"-[U]", "+ A$", "- [V]", "+ B $", "- "}},
      {"{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
       ChatLearn::assistant,
       {"-user", "+U", "-;assistant", "+A", "-;user", "+V", "-;assistant", "+B ", "-;"}},
  };
  for (const auto& [text, learn, expected] : cases) {
    INFO(text);
    CHECK(parts_of(format_of(text), line, learn) == expected);
  }
  const auto refused = [&](const std::string& text, ChatLearn learn, const std::vector<std::string>& words) {
    check_error([&] { parts_of(format_of(text), line, learn); }, words);
  };
  refused("{% for i in range(4) %}{{ messages[i].content }}{% endfor %}", ChatLearn::assistant,
          {"a.jsonl: line 3", "no loop over the messages", "message 2", "data.learn all"});
  refused(turn + turn, ChatLearn::assistant, {"several loops", "message 2"});
  refused("{% generation %}{{ messages[1].content }}{% endgeneration %}", ChatLearn::last, {"outside of a loop"});
  refused("{% set x %}{% generation %}a{% endgeneration %}{% endset %}", ChatLearn::assistant,
          {"{% generation %} within"});
  CHECK(parts_of(format_of("{% generation %}{{ messages[1].content }}{% endgeneration %}b"), line,
                 ChatLearn::assistant) == Parts{"+A", "-b"});
  // Of data.learn all only messages with weight 0 are left out.
  CHECK(parts_of(
            ChatFormat::chatml(Json::object()),
            R"({"messages": [{"role": "assistant", "content": "A", "weight": 0}, {"role": "user", "content": "U"}]})",
            ChatLearn::all) == Parts{"+<|im_start|>assistant\n", "-A<|im_end|>", "+\n<|im_start|>user\nU<|im_end|>\n"});
}

TEST_CASE("chat: a model's files say how conversations are written", "[data][chat]") {
  const std::string config =
      R"({"bos_token": {"content": "<b>"}, "eos_token": null, "chat_template": "C{{ bos_token }}"})";
  const std::string named =
      R"({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})";
  const auto read = [](const std::map<std::string, std::string>& files) { return ChatFormat::from_files(files, "m"); };
  CHECK(!read({{"tokenizer_config.json", "{}"}}).has_value());
  CHECK(read({{"tokenizer_config.json", config}})->text(chat_of(kChat)) == "C<b>");
  CHECK(read({{"tokenizer_config.json", config}, {"chat_template.jinja", "J{{ bos_token }}"}})->text(chat_of(kChat)) ==
        "J<b>");
  CHECK(read({{"tokenizer_config.json", named}})->text(chat_of(kChat)) == "T");
  CHECK(read({{"tokenizer_config.json", named}})->text(chat_of(R"({"messages": [{}]})")) == "D");
  const ChatFormat same = ChatFormat::from_json(read({{"tokenizer_config.json", named}})->to_json(), "state.json");
  CHECK(same.text(chat_of(kChat)) == "T");
  check_error(
      [&] {
        read({{"tokenizer_config.json", R"({"chat_template": 7})"}});
      },
      {"m/tokenizer_config.json", "is 7"});
  check_error(
      [&] {
        read({{"tokenizer_config.json", R"({"chat_template": [{"name": "x"}]})"}});
      },
      {"name and template"});
  check_error(
      [&] {
        read({{"tokenizer_config.json", R"({"chat_template": [{"name": "x", "template": "y"}]})"}});
      },
      {"no template is named \"default\""});
  check_error([&] { ChatFormat::from_json({{"templates", 1}}, "state.json"); }, {"state.json", "`templates`"});
  CHECK(ChatFormat::chatml(Json::object()).turn_end() == "<|im_end|>");
  CHECK(ChatFormat::chatml({{"bos_token", "<s>"}})
            .prompt(chat_of(R"({"messages": [{"role": "user", "content": "x"}]})")) ==
        "<s><|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");
}

TEST_CASE("chat: a conversation is tokenized whole, and its first separator is the document's", "[data][chat]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"),
             R"({"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]})"
             "\n");
  const ByteTokenizer bytes;
  CorpusOptions options{.files = {folder.file("a.jsonl")}, .format = TextFormat::jsonl};
  EncodedPiece found;
  const auto encode = [&] { encode_corpus(options, bytes, {}, [&](const EncodedPiece& piece) { found = piece; }); };
  encode();
  CHECK(found.chats);
  CHECK(bytes.decode(found.tokens) == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n");
  std::string learned;
  for (size_t i = 0; i < found.tokens.size(); ++i)
    if (found.learned[i] != 0) learned += static_cast<char>(found.tokens[i]);
  CHECK(learned == "b<|im_end|>");
}
